"""Pictures of what ranks did. A plot is a function from data to Axes; it never runs an experiment."""
