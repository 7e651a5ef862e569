"""Plans to pictures and pages."""
