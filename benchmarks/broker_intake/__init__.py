"""The intake of one broker, compared with the two things that it needs: a socket and a disk."""
