"""What single parts cost beside the design's budget: head, stage, controller, transport, memory."""
