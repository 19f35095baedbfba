"""HiExp: hierarchical experience for training search agents (arXiv 2604.08124)."""
