-- submit: adds the tasks of one step and the edges that lead into them.
--
-- KEYS[1]  epoch
-- KEYS[2]  graph (see includes/task.lua; keys derived from it share its hash tag)
-- KEYS[3]  ready lists
-- ARGV[1]  epoch of the caller
-- ARGV[2]  step; the first of an epoch is free, each further one follows the one before
-- ARGV[3]  most steps that may have a record at once
-- ARGV[4]  tasks: "<id> <t|a> " each; t plain, a to be announced
-- ARGV[5]  edges: "<source id> <target id> " each; a target is one of the tasks, a source is
--          one of them or of an earlier step. Edges must not form a cycle: its tasks would
--          never be ready
-- Reply    1
-- Errors   STALE
--          GRAPH  step out of order, too many open steps, a task twice, a task of another
--                 step, an edge from or to an unknown task
--
-- A task may be complete before it is submitted.
--- @include "fence"
--- @include "task"
--- @include "retire_steps"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local graph, ready, step = KEYS[2], KEYS[3], ARGV[2]
local record = graph .. ':' .. step
local bounds = redis.call('HMGET', graph, 'floor', 'last')
local floor, last = tonumber(bounds[1] or step), tonumber(bounds[2])
if last and tonumber(step) ~= last + 1 then
  return refuse('GRAPH', 'step ' .. step .. ' was submitted after step ' .. last)
end
if step - floor >= tonumber(ARGV[3]) then
  return refuse('GRAPH', 'step ' .. step .. ' was submitted while step ' .. floor .. ' is not complete')
end

-- Everything is checked before anything is written, so that a refusal changes nothing.
local early = redis.call('EXISTS', record) == 1
local names, flags, done = {}, {}, {}
local left = 0
for id, flag in string.gmatch(ARGV[4], '(%S+) (%S+)') do
  local rank, its_step = rank_and_step(id)
  if its_step ~= step or flags[id] then
    return refuse('GRAPH', 'task ' .. id .. ' cannot be submitted with step ' .. step)
  end
  names[#names + 1] = id
  flags[id] = flag
  local result = early and redis.call('HGET', record, id)
  if result then
    done[id] = string.sub(result, 2)
  else
    left = left + 1
  end
end

local waits, gathered, followers, elsewhere = {}, {}, {}, {}
for source, target in string.gmatch(ARGV[5], '(%S+) (%S+)') do
  local _, its_step = rank_and_step(source)
  if not flags[target] or not its_step then
    return refuse('GRAPH', 'an edge leads from ' .. source .. ' to ' .. target .. ', which is not in step ' .. step)
  end
  local result = done[source]
  local its = record
  if its_step ~= step then
    its = graph .. ':' .. its_step
    if tonumber(its_step) < floor then
      result = ''
    else
      local state = tonumber(its_step) < tonumber(step) and redis.call('HGET', its, source)
      if not state then
        return refuse('GRAPH', 'an edge leads to ' .. target .. ' from ' .. source .. ', which is unknown')
      end
      result = string.sub(state, 1, 1) == 'D' and string.sub(state, 2) or nil
    end
  elseif not flags[source] then
    return refuse('GRAPH', 'an edge leads to ' .. target .. ' from ' .. source .. ', which is unknown')
  end
  if result then
    gathered[target] = (gathered[target] or '') .. result
  elseif not done[target] then
    waits[target] = (waits[target] or 0) + 1
    if its == record then
      followers[source] = (followers[source] or '') .. target .. ' '
    else
      elsewhere[#elsewhere + 1] = { its, source .. '>', target .. ' ' }
    end
  end
end

local fields = { 'left', left }
for _, id in ipairs(names) do
  if not done[id] then
    fields[#fields + 1] = id
    fields[#fields + 1] = flags[id]
  end
end
for suffix, values in pairs({ ['#'] = waits, ['>'] = followers, ['$'] = gathered }) do
  for id, value in pairs(values) do
    fields[#fields + 1] = id .. suffix
    fields[#fields + 1] = value
  end
end
redis.call('HSET', record, unpack(fields))
for _, follower in ipairs(elsewhere) do
  local before = redis.call('HGET', follower[1], follower[2]) or ''
  redis.call('HSET', follower[1], follower[2], before .. follower[3])
end
redis.call('SADD', graph .. ':steps', step)
redis.call('HSET', graph, 'last', step, 'floor', floor)

for _, id in ipairs(names) do
  if flags[id] == 'a' and not done[id] and not waits[id] then
    local rank = rank_and_step(id)
    redis.call('RPUSH', ready .. ':' .. rank, id .. ' ' .. (gathered[id] or ''))
  end
end
if left == 0 then
  retire_steps(graph, { [step] = 0 }, floor, tonumber(step))
end
return 1
