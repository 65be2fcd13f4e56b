"""What one decode step does, for each kind of model. Every program is a fixed sequence of work on tensors that stay where
they are, so that a GPU can replay it, and the host needs no result to know what comes next."""
