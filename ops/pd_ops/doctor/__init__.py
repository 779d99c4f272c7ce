"""`pd-relay doctor`: whether this host can serve, and which paths it would take."""
