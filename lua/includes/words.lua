-- words(text, skip) -> the words of a text, which stand apart by spaces, but for the first `skip`.
local function words(text, skip)
  local found, position = {}, 0
  for word in string.gmatch(text, '%S+') do
    position = position + 1
    if position > skip then
      found[#found + 1] = word
    end
  end
  return found
end
