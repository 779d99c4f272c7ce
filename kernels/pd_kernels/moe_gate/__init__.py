"""The noaux_tc router."""
