"""What one broker takes in, beside the two things that it cannot do without: a socket and a disk."""
