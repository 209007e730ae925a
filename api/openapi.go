package api

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/labstack/echo/v4"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"backfill/internal/backfill"
)

//go:embed openapi.yaml
var documentYAML []byte

func (s *Server) openapi(c echo.Context) error {
	return c.Blob(http.StatusOK, "application/yaml", documentYAML)
}

func loadDocument() *openapi3.T {
	doc, err := openapi3.NewLoader().LoadFromData(documentYAML)
	if err == nil {
		err = doc.Validate(context.Background())
	}
	if err != nil {
		panic(fmt.Errorf("openapi.yaml: %w", err))
	}
	return doc
}

const bodyKey = "backfill.body"

// validate holds requests of a route to what the document says of it.
func (s *Server) validate(method, path string) echo.MiddlewareFunc {
	item := s.document.Paths.Find(path)
	if item == nil || item.GetOperation(method) == nil {
		panic("openapi.yaml does not have " + method + " " + path)
	}
	op := item.GetOperation(method)
	route := &routers.Route{Spec: s.document, Path: path, PathItem: item, Method: method, Operation: op}
	options := &openapi3filter.Options{
		MultiError: true, SkipSettingDefaults: true, AuthenticationFunc: openapi3filter.NoopAuthenticationFunc,
	}
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			if err := unescape(c); err != nil {
				return err
			}
			query, err := queryOf(c, op)
			if err != nil {
				return err
			}
			if err := readBody(c, op); err != nil {
				return err
			}
			params := map[string]string{}
			for _, name := range c.ParamNames() {
				params[name] = c.Param(name)
			}
			if err := openapi3filter.ValidateRequest(c.Request().Context(), &openapi3filter.RequestValidationInput{
				Request: c.Request(), PathParams: params, QueryParams: query, Route: route, Options: options,
			}); err != nil {
				return requestProblem(err, params)
			}
			return next(c)
		}
	}
}

// unescape puts path parameters into the spelling they stand for. Echo leaves them
// escaped when the path has an escape that is not the usual one, such as %2F.
func unescape(c echo.Context) error {
	values := c.ParamValues()
	for i, v := range values {
		if c.Request().URL.RawPath != "" {
			plain, err := url.PathUnescape(v)
			if err != nil {
				return malformed("the path has a broken escape")
			}
			values[i] = plain
		}
		if !storable(values[i]) {
			return backfill.Errorf(backfill.NotFound, "no %s of that name", c.ParamNames()[i])
		}
	}
	c.SetParamValues(values...)
	return nil
}

// queryOf returns the parameters that are given. An empty one counts as not given,
// and one that the document does not have is refused: a filter with a typo must
// not pass for an unfiltered list.
func queryOf(c echo.Context, op *openapi3.Operation) (url.Values, error) {
	given, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return nil, malformed("the query has a broken escape")
	}
	var wrong []backfill.FieldError
	for name, values := range given {
		values = slices.DeleteFunc(values, func(v string) bool { return v == "" })
		switch {
		case op.Parameters.GetByInAndName(openapi3.ParameterInQuery, name) == nil:
			wrong = append(wrong, backfill.FieldError{Field: name, Message: "is no parameter of this address"})
		case slices.ContainsFunc(values, func(v string) bool { return !storable(v) }):
			wrong = append(wrong, backfill.FieldError{Field: name, Message: "holds characters that no text can hold"})
		case len(values) == 0:
			delete(given, name)
		default:
			given[name] = values
		}
	}
	if len(wrong) > 0 {
		return nil, invalidInput(wrong)
	}
	// Handlers read the cleaned ones.
	c.Request().URL.RawQuery = given.Encode()
	return given, nil
}

// readBody reads a JSON body whole, for the validator, the handler and the hash
// that goes with an idempotency key.
func readBody(c echo.Context, op *openapi3.Operation) error {
	r := c.Request()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return err
		}
		return malformed("the body could not be read to its end")
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	c.Set(bodyKey, body)
	if op.RequestBody == nil {
		return nil
	}
	if len(body) == 0 {
		if op.RequestBody.Value.Required {
			return malformed("the request needs a JSON body")
		}
		return nil
	}
	if media, _, err := mime.ParseMediaType(r.Header.Get(echo.HeaderContentType)); err != nil || media != echo.MIMEApplicationJSON {
		return echo.NewHTTPError(http.StatusUnsupportedMediaType, "send the body as Content-Type: application/json")
	}
	if !utf8.Valid(body) {
		return malformed("the body is not UTF-8") // it would be read as something else
	}
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		return malformed("the body is not JSON: " + err.Error())
	}
	if o, ok := v.(map[string]any); ok && op.OperationID == "requestBackfill" {
		delete(o, "key") // looked at where the columns are known, to name the one
	}
	if at, ok := unstorable("", v); ok {
		return invalidInput([]backfill.FieldError{{Field: at, Message: "holds a character that no text can hold"}})
	}
	return nil
}

// unstorable finds a text, or a name, that PostgreSQL cannot hold.
func unstorable(at string, v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return at, !storable(v)
	case []any:
		for i, x := range v {
			if at, ok := unstorable(join(at, strconv.Itoa(i)), x); ok {
				return at, true
			}
		}
	case map[string]any:
		for name, x := range v {
			if !storable(name) {
				return at, true
			}
			if at, ok := unstorable(join(at, name), x); ok {
				return at, true
			}
		}
	}
	return "", false
}

func bodyOf(c echo.Context) []byte {
	b, _ := c.Get(bodyKey).([]byte)
	return b
}

// decode reads the body, which validate has checked, into v; none leaves v as it is.
func decode(c echo.Context, v any) error {
	body := bodyOf(c)
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, v); err != nil {
		return malformed("the body cannot be read: " + err.Error())
	}
	return nil
}

func invalidInput(fields []backfill.FieldError) error {
	slices.SortFunc(fields, func(a, b backfill.FieldError) int { return strings.Compare(a.Field, b.Field) })
	first := strings.TrimSpace(fields[0].Field + " " + fields[0].Message)
	return &backfill.Error{Code: backfill.Invalid, Message: "the request does not fit: " + first, Fields: fields}
}

// requestProblem names the parts of a request that do not fit the document.
func requestProblem(err error, params map[string]string) error {
	var all openapi3.MultiError
	if !errors.As(err, &all) {
		all = openapi3.MultiError{err}
	}
	var fields []backfill.FieldError
	for _, err := range all {
		var re *openapi3filter.RequestError
		if !errors.As(err, &re) {
			return fmt.Errorf("validate request: %w", err)
		}
		if p := re.Parameter; p != nil && p.In == openapi3.ParameterInPath {
			return backfill.Errorf(backfill.NotFound, "no %s %.100q", p.Name, params[p.Name])
		}
		name := ""
		if re.Parameter != nil {
			name = re.Parameter.Name
		}
		fields = append(fields, fieldErrors(name, re)...)
	}
	return invalidInput(fields)
}

// fieldErrors walks down to the failures at the bottom: those name a field.
func fieldErrors(name string, err error) []backfill.FieldError {
	var several openapi3.MultiError
	if errors.As(err, &several) {
		var out []backfill.FieldError
		for _, err := range several {
			out = append(out, fieldErrors(name, err)...)
		}
		return out
	}
	var schema *jsonschema.ValidationError
	var legacy *openapi3.SchemaError // of schemas that refer to others
	var parse *openapi3filter.ParseError
	switch {
	case errors.As(err, &schema):
		return schemaErrors(join(name, schema.InstanceLocation...), schema.ErrorKind)
	case errors.As(err, &legacy):
		return []backfill.FieldError{{Field: join(name, legacy.JSONPointer()...), Message: legacy.Reason}}
	case errors.As(err, &parse):
		return []backfill.FieldError{{Field: name, Message: "is " + parse.Reason}}
	}
	return []backfill.FieldError{{Field: name, Message: err.Error()}}
}

var english = message.NewPrinter(language.English)

func schemaErrors(at string, failed jsonschema.ErrorKind) (out []backfill.FieldError) {
	switch failed := failed.(type) {
	case *kind.Required:
		for _, missing := range failed.Missing {
			out = append(out, backfill.FieldError{Field: join(at, missing), Message: "is missing"})
		}
	case *kind.AdditionalProperties:
		for _, extra := range failed.Properties {
			out = append(out, backfill.FieldError{Field: join(at, extra), Message: "is not known here"})
		}
	case *kind.Pattern:
		out = append(out, backfill.FieldError{Field: at, Message: "holds characters that are not allowed"})
	default:
		said := failed.LocalizedString(english)
		if short, ok := failed.(*kind.MinLength); ok && short.Got == 0 {
			said = "is empty"
		}
		out = append(out, backfill.FieldError{Field: at, Message: said})
	}
	return out
}

func join(name string, path ...string) string {
	return strings.Trim(name+"."+strings.Join(path, "."), ".")
}
