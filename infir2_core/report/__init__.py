"""Pictures, comparisons and pages drawn from run folders. Nothing here trains, and nothing here changes a run."""
