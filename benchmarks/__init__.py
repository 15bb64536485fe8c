"""What `tidemill bench NAME` runs."""
