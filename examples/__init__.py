"""Complete small jobs, from data to the robot."""
