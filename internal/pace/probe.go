package pace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// ProbeTimeout is how long any measurement may take.
const ProbeTimeout = 3 * time.Second

var probes = &http.Client{
	Timeout: ProbeTimeout,
	// Where a gate leads to is what an admin wrote, not what a server answers.
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	// A proxy's or an idle connection's answer could be an old one.
	Transport: &http.Transport{DisableKeepAlives: true, TLSHandshakeTimeout: ProbeTimeout},
}

// AskHTTP returns the status that an address answers to GET with. Only 200, 429
// and 503 are answers, anything else is an error.
func AskHTTP(ctx context.Context, address string) (float64, error) {
	res, err := get(ctx, address)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	switch res.StatusCode {
	case http.StatusOK, http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return float64(res.StatusCode), nil
	}
	return 0, fmt.Errorf("it answers %d, expected 200 for open, 429 or 503 for closed", res.StatusCode)
}

// AskPrometheus evaluates a query on the Prometheus at a base address. Of several
// series the greatest value counts; none, or one that is not a number, is an error.
func AskPrometheus(ctx context.Context, base, query string) (float64, error) {
	res, err := get(ctx, strings.TrimRight(base, "/")+"/api/v1/query?query="+url.QueryEscape(query))
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	var answer struct {
		Status, Error string
		Data          struct {
			ResultType string
			Result     json.RawMessage
		}
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, 1<<20)).Decode(&answer); err != nil {
		return 0, fmt.Errorf("the answer (status %d) is not Prometheus's", res.StatusCode)
	}
	if answer.Status != "success" {
		return 0, fmt.Errorf("the Prometheus server says: %s", answer.Error)
	}
	var samples []sample
	switch answer.Data.ResultType {
	case "scalar":
		samples = make([]sample, 1)
		err = json.Unmarshal(answer.Data.Result, &samples[0])
	case "vector":
		var series []struct{ Value sample }
		err = json.Unmarshal(answer.Data.Result, &series)
		for _, s := range series {
			samples = append(samples, s.Value)
		}
	default:
		return 0, fmt.Errorf("the query returns a %s, expected a number", answer.Data.ResultType)
	}
	if err != nil {
		return 0, errors.New("the answer is not Prometheus's")
	}
	if len(samples) == 0 {
		return 0, errors.New("the query returns no series")
	}
	value := math.Inf(-1)
	for _, s := range samples {
		if math.IsNaN(float64(s)) {
			return 0, errors.New("the query returns what is not a number")
		}
		value = max(value, float64(s))
	}
	return value, nil
}

// sample is a value as Prometheus writes it: [time, "value"].
type sample float64

func (s *sample) UnmarshalJSON(raw []byte) error {
	var pair [2]json.RawMessage
	var text string
	if err := json.Unmarshal(raw, &pair); err != nil {
		return err
	}
	if err := json.Unmarshal(pair[1], &text); err != nil {
		return err
	}
	v, err := strconv.ParseFloat(text, 64)
	*s = sample(v)
	return err
}

func get(ctx context.Context, address string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, errors.New("the address cannot be understood")
	}
	res, err := probes.Do(req)
	var outer *url.Error
	if errors.As(err, &outer) {
		err = outer.Err // without the address, which the gate shows anyway
	}
	return res, err
}
