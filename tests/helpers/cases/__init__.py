"""Cases of kernels with their checks against float64, drawn problems, and problems without memory."""
