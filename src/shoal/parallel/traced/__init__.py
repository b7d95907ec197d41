"""What a module that declares nothing is made of, found by tracing its forward (torch.fx, arXiv:2112.08429)."""
