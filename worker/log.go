package worker

import (
	"go.temporal.io/sdk/log"
	"go.uber.org/zap"
)

// Logger lets the Temporal SDK log through zap.
func Logger(l *zap.Logger) log.Logger {
	return sugar{l.WithOptions(zap.AddCallerSkip(1)).Sugar()}
}

type sugar struct{ s *zap.SugaredLogger }

func (l sugar) Debug(msg string, kv ...any) { l.s.Debugw(msg, kv...) }
func (l sugar) Info(msg string, kv ...any)  { l.s.Infow(msg, kv...) }
func (l sugar) Warn(msg string, kv ...any)  { l.s.Warnw(msg, kv...) }
func (l sugar) Error(msg string, kv ...any) { l.s.Errorw(msg, kv...) }
func (l sugar) With(kv ...any) log.Logger   { return sugar{l.s.With(kv...)} }
