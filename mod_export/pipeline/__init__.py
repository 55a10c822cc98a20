"""What each stage of a build does. Every unit of work is a step of the workspace: unchanged inputs, reused outputs."""
