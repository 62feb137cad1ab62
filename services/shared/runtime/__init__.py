"""Scaffolding that every process shares: settings, channels, lifecycle, telemetry. No torch."""
