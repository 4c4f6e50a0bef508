"""Expected results in float64."""
