"""Evenly: train PyTorch models on several devices by changing one line."""
