"""One step of an engine: prompt chunks, or drafting and verification. What runs when is the schedulers' business."""
