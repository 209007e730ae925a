package main

import (
	"context"
	"fmt"
	"time"

	"go.temporal.io/api/enums/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.temporal.io/api/workflowservice/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// searchAttributes are what Backfill's workflows set, by name.
var searchAttributes = map[string]enums.IndexedValueType{
	"BackfillSite":  enums.INDEXED_VALUE_TYPE_KEYWORD,
	"BackfillTable": enums.INDEXED_VALUE_TYPE_KEYWORD,
	"BackfillFrom":  enums.INDEXED_VALUE_TYPE_KEYWORD,
	"BackfillState": enums.INDEXED_VALUE_TYPE_KEYWORD,
	"BackfillRows":  enums.INDEXED_VALUE_TYPE_INT,
}

// registerSearchAttributes returns when the frontend answers queries by every search attribute. A new file has them from
// the start; the ones an older file lacks are added.
func registerSearchAttributes(ctx context.Context, hostPort string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := grpc.NewClient(hostPort, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the frontend at %s: %w", hostPort, err)
	}
	defer func() { _ = conn.Close() }()

	if err := addMissing(ctx, operatorservice.NewOperatorServiceClient(conn)); err != nil {
		return fmt.Errorf("register search attributes: %w", err)
	}
	workflows := workflowservice.NewWorkflowServiceClient(conn)
	for name, typ := range searchAttributes {
		query := name + " = 'none'"
		if typ == enums.INDEXED_VALUE_TYPE_INT {
			query = name + " = 0"
		}
		request := &workflowservice.CountWorkflowExecutionsRequest{Namespace: namespace, Query: query}
		err := retry(ctx, func() error {
			_, err := workflows.CountWorkflowExecutions(ctx, request)
			return err
		})
		if err != nil {
			return fmt.Errorf("query by search attribute %s: %w", name, err)
		}
	}
	return nil
}

// addMissing asks first: adding one that is there is harmless but logged as a warning.
func addMissing(ctx context.Context, operator operatorservice.OperatorServiceClient) error {
	var known *operatorservice.ListSearchAttributesResponse
	err := retry(ctx, func() (err error) {
		known, err = operator.ListSearchAttributes(ctx, &operatorservice.ListSearchAttributesRequest{Namespace: namespace})
		return err
	})
	if err != nil {
		return err
	}
	missing := make(map[string]enums.IndexedValueType)
	for name, typ := range searchAttributes {
		switch have, ok := known.GetCustomAttributes()[name]; {
		case !ok:
			missing[name] = typ
		case have != typ:
			return fmt.Errorf("%s is of type %s but must be %s; start with a new --db file", name, have, typ)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return retry(ctx, func() error {
		_, err := operator.AddSearchAttributes(ctx, &operatorservice.AddSearchAttributesRequest{
			Namespace: namespace, SearchAttributes: missing,
		})
		return err
	})
}

// retry calls f until it succeeds or ctx ends: a frontend that has just started, or a namespace that has just changed,
// takes a moment to be known to every service. It returns the last error of f.
func retry(ctx context.Context, f func() error) error {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-ticker.C:
		}
	}
}
