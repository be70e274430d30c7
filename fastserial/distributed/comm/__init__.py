"""What ranks say to each other: along a tree, through the job's store, and bytes."""
