"""The verb `bench`: how fast this machine trains a configuration, shared and unshared, and where the time goes."""
