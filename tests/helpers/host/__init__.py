"""Device code on the host: its arithmetic, its warps, and a stand-in for the DSL's compiler."""
