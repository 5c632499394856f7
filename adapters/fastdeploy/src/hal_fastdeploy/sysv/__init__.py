"""The transport ``sysv://``: FastDeploy's System V queues and their message layouts."""
