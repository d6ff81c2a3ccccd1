"""Where trials run: the GPUs of this host, or a Ray cluster."""
