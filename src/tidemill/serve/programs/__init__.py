"""Programs as environments: agents of any framework that are given an endpoint, a key and a task."""
