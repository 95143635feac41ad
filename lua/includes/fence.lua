--- @include "refuse"

-- fence(key, epoch) -> an error reply if `epoch` is not the one that `key` holds, else nil.
local function fence(key, epoch)
  local current = redis.call('GET', key)
  if current == epoch then
    return nil
  end
  return refuse('STALE', 'epoch ' .. epoch .. ' is over, the current one is ' .. (current or 'none'))
end
