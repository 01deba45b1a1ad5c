"""How good a policy is: pass rates with confidence intervals, and what it wrote."""
