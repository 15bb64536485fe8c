"""What a run will take before it starts: a model of time, and a search for the layout that suits a cluster."""
