"""What several wings stand on: settings, sockets, life cycle, weight layout, placement, estimates."""
