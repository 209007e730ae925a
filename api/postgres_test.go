package api

import "context"

func startPostgres(context.Context) (stop func(), err error) {
	dsnOf = func(database string) string { return "host=/tmp/kw port=5999 user=postgres dbname=" + database }
	return func() {}, nil
}
