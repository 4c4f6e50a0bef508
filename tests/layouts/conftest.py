from hypothesis import settings

# The time of one example says more about the machine's load than about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
