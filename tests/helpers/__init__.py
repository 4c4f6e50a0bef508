"""Code shared by tests of several folders, in a package for each kind."""
