package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

// node is the server that holds the projection's keys.
func (s *Sink) node(ctx context.Context, projection string) (goredis.Cmdable, error) {
	key := liveKey(projection)
	switch c := s.client.(type) {
	case interface {
		MasterForKey(ctx context.Context, key string) (*goredis.Client, error)
	}:
		return c.MasterForKey(ctx, key)
	case interface {
		GetShardClientForKey(key string) (*goredis.Client, error)
	}:
		return c.GetShardClientForKey(key)
	}
	return s.client, nil
}

// checkClient refuses a cluster's client that may read from a replica, which lags: what the
// sink reads it decides by.
func (s *Sink) checkClient() error {
	c, ok := s.client.(*goredis.ClusterClient)
	if !ok {
		return nil
	}
	if o := c.Options(); o.ReadOnly || o.RouteByLatency || o.RouteRandomly {
		return &setupError{errors.New("tidemark/redis: the client may read from replicas, which lag behind, so that a model would be wrong; " +
			"give the sink a client without ReadOnly, RouteByLatency and RouteRandomly (readers of the model may have another)")}
	}
	return nil
}

// checkServer refuses a server that would lose rows without telling.
func (s *Sink) checkServer(ctx context.Context, projection string) error {
	if s.trustServer {
		return nil
	}
	node, err := s.node(ctx, projection)
	if err != nil {
		return failed("find the server", err)
	}
	info, err := s.info(ctx, node)
	if err != nil {
		return err
	}
	if info["loading"] == "1" || info["async_loading"] == "1" {
		// Meanwhile it says that it has no append-only file (7.0 does, while it reads that).
		return &brokenError{errors.New("tidemark/redis: the server is still reading what it has kept")}
	}
	var faults []error
	if v := info["redis_version"]; before(v, 6, 2) {
		faults = append(faults, fmt.Errorf("it is version %s; 6.2 or newer is needed", v))
	}
	// A policy volatile-… takes keys that expire, and none of the library's does.
	if p := info["maxmemory_policy"]; strings.HasPrefix(p, "allkeys-") && info["maxmemory"] != "0" {
		faults = append(faults, fmt.Errorf("its maxmemory-policy is %s, under which it removes rows when memory is short, and the model would be wrong; "+
			"set maxmemory-policy to noeviction, or to one that begins with volatile-, or use another server for models", p))
	}
	if !s.volatile && info["aof_enabled"] != "1" {
		fault, err := s.checkSnapshots(ctx, node)
		if err != nil {
			return failed("ask the server for its snapshots", err)
		}
		faults = append(faults, fault)
	}
	if err := errors.Join(faults...); err != nil {
		return &setupError{fmt.Errorf("tidemark/redis: the server is not fit to keep a model: %w", err)}
	}
	return nil
}

// info asks by INFO, which is allowed where CONFIG is not.
func (s *Sink) info(ctx context.Context, node goredis.Cmdable) (map[string]string, error) {
	text, err := node.Info(ctx, "everything").Result()
	if denied(err) {
		return nil, &setupError{fmt.Errorf("tidemark/redis: whether the server keeps what it is given can't be told, since the user may not call INFO; "+
			"grant it (ACL SETUSER … +info +config|get), or use the option TrustServer: %w", err)}
	}
	if err != nil {
		return nil, failed("ask the server for its settings", err)
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[k] = v
		}
	}
	return info, nil
}

// checkSnapshots looks for the second best way to keep data over a restart.
func (s *Sink) checkSnapshots(ctx context.Context, node goredis.Cmdable) (fault, err error) {
	save, err := node.ConfigGet(ctx, "save").Result()
	switch {
	case denied(err):
		return fmt.Errorf("it has no append-only file, and whether it makes snapshots can't be told, since the user may not call CONFIG GET; "+
			"switch appendonly on, grant it (ACL SETUSER … +config|get), or use the option AllowVolatile: %w", err), nil
	case err != nil:
		return nil, err
	case save["save"] == "":
		return errors.New("it writes nothing to disk, so that its restart would lose every model; set appendonly to yes (best), or save, " +
			"or use the option AllowVolatile to have the models built again then"), nil
	}
	return nil, nil
}

// denied: by an ACL, or since the command was renamed or is not offered.
func denied(err error) bool {
	return err != nil && serverError(err) &&
		(strings.Contains(err.Error(), "NOPERM") || strings.Contains(strings.ToLower(err.Error()), "unknown command"))
}

// before compares a version, such as 7.0.15. One that can't be read passes.
func before(version string, major, minor int) bool {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return false
	}
	a, err1 := strconv.Atoi(parts[0])
	b, err2 := strconv.Atoi(parts[1])
	return err1 == nil && err2 == nil && (a < major || a == major && b < minor)
}
