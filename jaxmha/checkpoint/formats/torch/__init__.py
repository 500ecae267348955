"""Files of torch.save: a zip of a pickle and one member per storage."""
