"""The parts of h200_learning.py: what is trained, how it is planned, the processes, and what is kept."""
