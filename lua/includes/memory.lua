-- memory_share() -> the share of the memory of a Redis that evicts nothing (maxmemory) that is used; 0
-- if it has no limit, evicts, or does not tell.
local function memory_share()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' or not info:find('maxmemory_policy:noeviction', 1, true) then
    return 0
  end
  local used, most = info:match('used_memory:(%d+)'), info:match('maxmemory:(%d+)')
  return tonumber(most) > 0 and used / most or 0
end
