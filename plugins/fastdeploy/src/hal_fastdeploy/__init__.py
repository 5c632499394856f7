"""What hal needs for FastDeploy alone: its System V message queues."""
