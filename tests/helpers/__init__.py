"""Code shared by tests of several folders: batches, the float64 reference, cases, stand-ins for the GPU and the DSL."""
