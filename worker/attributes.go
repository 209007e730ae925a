package worker

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	enumspb "go.temporal.io/api/enums/v1"
	"go.temporal.io/api/operatorservice/v1"
	"go.uber.org/zap"

	"backfill/workflows"
)

// register adds the search attributes that the namespace lacks: no workflow can start
// without. Where this process may not, as in Temporal Cloud, it says what is missing.
func (cfg Config) register(ctx context.Context) {
	namespace := cfg.Namespace
	if namespace == "" {
		namespace = "default"
	}
	for wait := 2 * time.Second; ctx.Err() == nil; wait = min(2*wait, time.Minute) {
		missing, err := cfg.missingAttributes(ctx, namespace)
		if err == nil && len(missing) == 0 {
			return
		}
		if err == nil {
			_, err = cfg.Temporal.OperatorService().AddSearchAttributes(ctx, &operatorservice.AddSearchAttributesRequest{Namespace: namespace, SearchAttributes: missing})
		}
		if err == nil {
			cfg.Log.Info("search attributes were added", zap.String("namespace", namespace), zap.Strings("names", slices.Sorted(maps.Keys(missing))))
			return
		}
		if ctx.Err() == nil {
			cfg.Log.Warn("search attributes could not be looked up or added, trying again; without them no workflow starts", zap.String("namespace", namespace),
				zap.String("needed", attributesText()), zap.Error(err))
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

func (cfg Config) missingAttributes(ctx context.Context, namespace string) (map[string]enumspb.IndexedValueType, error) {
	known, err := cfg.Temporal.OperatorService().ListSearchAttributes(ctx, &operatorservice.ListSearchAttributesRequest{Namespace: namespace})
	if err != nil {
		return nil, err
	}
	missing := map[string]enumspb.IndexedValueType{}
	for _, a := range workflows.SearchAttributes {
		if _, ok := known.GetCustomAttributes()[a.GetName()]; !ok {
			missing[a.GetName()] = a.GetValueType()
		}
	}
	return missing, nil
}

func attributesText() string {
	var all []string
	for _, a := range workflows.SearchAttributes {
		all = append(all, a.GetName()+" "+a.GetValueType().String())
	}
	return strings.Join(all, ", ")
}
