"""What tests of several folders share: batches, the float64 reference, cases, and what stands in for the GPU or DSL."""
