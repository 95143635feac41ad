-- set_epoch_fields: sets fields of a hash that is deleted at the end of the epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  hash of the epoch
-- ARGV[1]  epoch of the caller
-- ARGV[2..] fields and values
-- Reply    1
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 1
