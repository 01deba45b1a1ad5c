"""The training algorithms: what a step's data and objective are."""
