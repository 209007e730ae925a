// Package acceptance tests the program from outside: it runs `backfill dev` as a
// process on PostgreSQL databases of the test's own, talks to it by HTTP, command
// line and Temporal as people and scripts do, kills it, and compares the two
// databases afterwards. Its tests need Linux, PostgreSQL's server programs and
// bin/backfill-temporal.
//
// BACKFILL_ACCEPTANCE_ROWS=1000000 makes the orders tests run at full size (give
// go test a -timeout of an hour); by default they are small. BACKFILL_BIN names a
// program to test instead of building one.
package acceptance
