module pg-status

go 1.26.0

require (
	github.com/lib/pq v1.12.3
	golang.org/x/sys v0.50.0
)
