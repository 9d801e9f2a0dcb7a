"""`sharebert deep-linear`: the paper's theory (arXiv 2110.03848, section 3) run on deep linear networks, float64."""
