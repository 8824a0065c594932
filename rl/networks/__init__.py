"""Networks: a configuration names shapes; one file a kind, whose `build` makes the torch module."""
