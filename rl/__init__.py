"""Deep reinforcement learning experiments, composed by Hydra from the command line."""
