"""Recipes from other frameworks' settings: `tidemill from trl|verl FILE`."""
