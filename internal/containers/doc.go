// Package containers holds tests that run the system as it is deployed: each part in
// a container of its own, from the images that `make images` makes, on networks that
// the tests cut. They run when BACKFILL_CONTAINERS is set: `make test-containers`.
package containers
