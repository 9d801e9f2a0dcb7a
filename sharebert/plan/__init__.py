"""The verb `plan`: what a run would take and write."""
