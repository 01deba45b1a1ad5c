"""Parts of tools/soak.py: the job, the faults, and what must hold after them."""
